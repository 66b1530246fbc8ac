"""A global shuffle over compact data that decodes a batch for every record is a warning."""

import warnings

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.testing import rollouts
from ragged_format.torch import Mixture, RaggedDataset, RaggedIterable, RaggedLoader


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    batch = rollouts(np.random.default_rng(0), num_samples=24, vocab_size=300)
    folder = tmp_path_factory.mktemp("warned")
    for encoding in ("hot", "compact"):
        with rf.Writer(folder / encoding, batch.schema, batch_rows=4, encoding=encoding) as writer:
            writer.write(batch)
    return folder


SMALL = {"max_decoded_bytes": 1000}


@pytest.mark.parametrize("shuffle", [True, "global"])
@pytest.mark.parametrize("kind", [RaggedLoader, RaggedIterable])
def test_it_names_both_ways_out_and_the_line_that_asks_for_it(places, kind, shuffle):
    with pytest.warns(rf.RaggedWarning, match="shuffle='block'") as caught:
        kind(places / "compact", shuffle=shuffle, **SMALL)
    (warning,) = caught
    assert "ragged expand IN OUT" in str(warning.message)
    assert warning.filename == __file__


def test_it_comes_once_for_a_loader_that_is_used_for_epochs(places):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with RaggedLoader(places / "compact", 5, shuffle=True, prefetch=0, **SMALL) as loader:
            assert sum(batch.num_rows for _ in range(2) for batch in loader) == 48
    assert len(caught) == 1


def test_files_and_mixtures_are_looked_at_too(places):
    (shard,) = (places / "compact").glob("*.arrow")
    mixture = Mixture([places / "hot", places / "compact"])
    for source in (shard, rf.Dataset(places / "compact"), mixture):
        with pytest.warns(rf.RaggedWarning):
            RaggedLoader(source, shuffle=True, **SMALL)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("compact", {"shuffle": True}), ("compact", {"shuffle": False, **SMALL}),
        ("compact", {"shuffle": "block", **SMALL}), ("hot", {"shuffle": True, **SMALL}),
    ],
    ids=["all kept", "in order", "block", "hot"],
)  # fmt: skip
def test_what_costs_nothing_is_no_warning(places, place, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RaggedLoader(places / place, **options)
        RaggedDataset(places / place)
