"""Ledgers and counters of a conversion."""

from ragged_format.adapters.report import ConversionReport, Ledger


def test_a_ledger_adds_up_when_all_is_stored_or_dropped():
    ledger = Ledger(taken=3, stored=1)
    assert not ledger.is_balanced
    ledger.drop("a")
    ledger.drop("b", 1)
    ledger.drop("c", 0)
    assert ledger.is_balanced
    assert ledger.to_dict() == {"taken": 3, "stored": 1, "dropped": {"a": 1, "b": 1}}


def full():
    report = ConversionReport()
    report.responses = Ledger(2, 1)
    report.responses.drop("RF-A003")
    report.noted["x"] = 2
    report.noted["nothing"] = 0
    return report


def test_reports_add_up():
    total = ConversionReport()
    total += full()
    total += full()
    assert total.responses.to_dict() == {"taken": 4, "stored": 2, "dropped": {"RF-A003": 2}}
    assert total.noted == {"x": 4}
    assert total.unbalanced() == []
    assert full().to_dict()["noted"] == {"x": 2}


def test_counts_go_to_a_report_a_mapping_or_nowhere():
    report, mapping = ConversionReport(), {"mine": 1}
    for target in (report, mapping, None):
        full().add_to(target)
        full().add_to(target)
    assert report.noted == {"x": 4}
    assert mapping.pop("mine") == 1
    assert mapping == report.to_dict()


def test_an_unbalanced_ledger_is_named():
    report = full()
    report.candidates.taken = 1
    assert report.unbalanced() == ["candidates"]
