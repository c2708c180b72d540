import numpy as np
import pytest

from kv_pool import BlockHasher, InvalidArgumentError, InvalidTypeError, LoRARequest, Request


def test_generated_tokens_complete_blocks():
    hasher = BlockHasher("sha256", "s", 4)
    request = Request("r", [0, 1], hasher, cache_salt="tenant")
    for token in range(2, 9):
        request.append_output_token_ids([token])
    assert request.block_hashes == Request("twin", range(9), hasher, cache_salt="tenant").block_hashes
    assert len(request.block_hashes) == 2
    assert (request.num_tokens, request.num_prompt_tokens) == (9, 2)


@pytest.mark.parametrize(("wrong", "error"), [(-1, InvalidArgumentError), ("x", InvalidTypeError)])
def test_tokens_that_cannot_be_hashed_are_not_appended(wrong, error):
    request = Request("r", [1, 2, 3], BlockHasher("sha256", "s", 2))
    hashes = list(request.block_hashes)
    with pytest.raises(error):
        request.append_output_token_ids([4, 5, wrong])
    assert request.all_token_ids == [1, 2, 3]
    assert request.block_hashes == hashes


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidArgumentError, match="empty prompt"):
        Request("r", [], BlockHasher())


def test_a_numpy_prompt_becomes_python_ints():
    request = Request("r", np.arange(4), BlockHasher(block_size=4))
    request.append_output_token_ids(np.array([9]))
    assert {type(token_id) for token_id in request.all_token_ids} == {int}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adapter", 1, "/p"), "adapter_id is a str: 'adapter'; .* in this order"),
        ((1, 2, "/p"), "name is a int: 2"),
        ((1, "adapter", None), "path is a NoneType"),
    ],
)
def test_adapter_arguments_in_vllms_order_are_refused(arguments, message):
    with pytest.raises(InvalidTypeError, match=message):
        LoRARequest(*arguments)
