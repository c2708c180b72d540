"""examples/parallel_sampling.py with other numbers of sequences than in the example."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent.parent / "examples" / "parallel_sampling.py"
_spec = importlib.util.spec_from_file_location("parallel_sampling", PATH)
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_parallel_samples_equal_separately_drawn_samples(num_samples):
    engine = example.Engine()
    assert example.sample(engine, num_samples) == example.sample_without_blocks(num_samples)
    assert engine.num_copies == num_samples - 1  # all but one copy the prompt's last block
    assert engine.manager.get_num_free_blocks() == example.NUM_BLOCKS


@pytest.mark.parametrize("width", range(1, 8))
def test_beams_equal_those_of_a_search_without_blocks(width):
    engine = example.Engine()
    assert example.search(engine, width) == example.search_without_blocks(width)
    assert engine.manager.get_num_free_blocks() == example.NUM_BLOCKS
