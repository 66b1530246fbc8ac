"""Doubles of prime-rl that float32 cannot hold are counted."""

from ragged_format.adapters.prime_rl import TrainingSample, to_samples
from ragged_format.adapters.report import ConversionReport


def test_rounded_values_are_counted():
    sample = TrainingSample(
        [5, 6, 7, 8], [False, False, True, True], [0.0, 0.0, -0.5, -0.1], [1.0] * 4, "math",
        ref_logprobs=[0.0, 0.0, -0.3, -0.25], rl_weights=[0.0, 0.0, 1.0, 0.1],
        advantages=[0.0, 0.0, 0.1, 0.3],
    )  # fmt: skip
    report = ConversionReport()
    batch = to_samples([sample], vocab_size=10, report=report)
    counts = {name: n for name, n in report.converted.items() if n and name.endswith("rounded")}
    assert counts == {
        "log_probs_rounded": 1, "ref_logprobs_rounded": 1, "rl_weights_rounded": 1,
    }  # fmt: skip
    assert batch["advantages"].to_pylist() == [[0.1, 0.3]]
