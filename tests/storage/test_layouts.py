import pytest
from storage.made_storage import BLOCK_AXES

from kv_pool import InvalidArgumentError
from kv_pool.storage import KVStorage
from kv_pool.storage.layouts import LAYOUTS, parse_layout

L, B, N, H, D = 2, 5, 4, 3, 8
ALL_OF_ONE_LAYER = 2 * N * H * D * 2  # bytes of one block of one layer, K and V, float16


def make(layout, num_blocks=B):
    return KVStorage.allocate(
        num_blocks, N, L, 1 if layout in ("MLA", "LBND", "L|BND") else H, D, layout=layout
    )


@pytest.mark.parametrize(
    ("layout", "spans", "order"),
    [
        ("LBNHC", [ALL_OF_ONE_LAYER] * L, "LNH2D"),
        ("LBHNC", [ALL_OF_ONE_LAYER] * L, "LHN2D"),
        ("LHBNC", [ALL_OF_ONE_LAYER // H] * L * H, "LHN2D"),
        ("BLHNC", [ALL_OF_ONE_LAYER * L], "LHN2D"),
        ("BLNHC", [ALL_OF_ONE_LAYER * L], "LNH2D"),
        ("BHLNC", [ALL_OF_ONE_LAYER * L], "HLN2D"),
        ("FLASH", [ALL_OF_ONE_LAYER // 2] * 2 * L, "L2NHD"),
        ("LB2NHD", [ALL_OF_ONE_LAYER] * L, "L2NHD"),
        ("LB2HND", [ALL_OF_ONE_LAYER] * L, "L2HND"),
        ("SGLANG", [ALL_OF_ONE_LAYER // 2] * 2 * L, "L2NHD"),
        ("TRTLLM", [ALL_OF_ONE_LAYER * L], "L2HND"),
        ("MLA", [N * D * 2] * L, "LND"),
    ],
)
@pytest.mark.parametrize("num_blocks", [1, B])
def test_each_layout_has_the_listed_spans(layout, spans, order, num_blocks):
    storage = make(layout, num_blocks)
    assert storage.segments.spans.tolist() == spans
    written = storage.block_format.split()[1:]
    assert "".join(axis[0] for axis in written) == order


def test_every_named_layout_is_covered_by_the_copy_tests():
    assert set(LAYOUTS.values()) == set(BLOCK_AXES)


def test_layouts_are_found_by_name_or_notation():
    assert parse_layout("nhd") == parse_layout("LBNHC") == parse_layout("L|BNHC")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("NDH", "unknown layout 'NDH'; known are LBNHC"),
        ("L|BNH", "it needs L, B, N, D once each"),
        ("L|BNHDC", "it needs L, B, N, D once each"),
        ("L|BNHX", "it needs L, B, N, D once each"),
        ("LB|NHC", "only L and 2 can be lists"),
        ("L|B2ND", "has K and V but no heads"),
    ],
)
def test_invalid_layouts_are_refused(layout, said):
    with pytest.raises(InvalidArgumentError, match=said):
        parse_layout(layout)
