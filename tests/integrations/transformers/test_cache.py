"""An unmodified model generates the same from the pool's blocks as from its own cache."""

import pytest
from integrations.transformers.made_model import (
    check_kv,
    generate_dense,
    make_model,
    make_request,
    make_sequences,
    run_step,
)

from kv_pool import InvalidArgumentError, OutOfBlocksError

pytestmark = pytest.mark.transformers

PROMPT = tuple(range(10, 31))  # 21 tokens: 5 full blocks and one token


def generate(sequences, requests, num_tokens, model=None):
    import torch

    from kv_pool.integrations.transformers import PagedCache

    input_ids = torch.tensor([request.all_token_ids for request in requests])
    output = (model or make_model()).generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        cache=PagedCache(sequences, requests),
        max_new_tokens=num_tokens,
    )
    return output[:, input_ids.shape[1] :].tolist()


@pytest.mark.parametrize("layout", ["NHD", "HND", "FLASH", "SGLANG", "TRTLLM"])
def test_generate_matches_the_run_without_a_pool(layout):
    sequences = make_sequences(layout=layout)
    request = make_request("r", PROMPT)
    assert sequences.admit(request) == 0
    assert generate(sequences, [request], 12) == [generate_dense(PROMPT, 12)]
    assert request.num_computed_tokens == len(PROMPT) + 11
    request.append_output_token_ids(generate_dense(PROMPT, 12))
    check_kv(sequences, request)


def test_cached_prefix_is_not_recomputed():
    sequences = make_sequences()
    first = make_request("first", PROMPT)
    sequences.admit(first)
    generate(sequences, [first], 8)
    first.append_output_token_ids(generate_dense(PROMPT, 8))
    sequences.note_computed(first, first.num_computed_tokens)
    held = sequences.manager.get_block_ids("first")

    # Recomputing the prefix would be detected: the storage's blocks would change.
    longer = PROMPT + tuple(generate_dense(PROMPT, 8)) + (1, 2)
    second = make_request("second", longer)
    assert sequences.admit(second) == 28
    assert sequences.manager.get_block_ids("second")[:7] == held[:7]
    before = [sequences.storage.read_block(block_id) for block_id in held[:7]]
    widths = []
    model = counting_model(widths)
    assert generate(sequences, [second], 4, model) == [generate_dense(longer, 4)]
    assert widths == [len(longer) - 28, 1, 1, 1]
    assert [sequences.storage.read_block(block_id) for block_id in held[:7]] == before


def counting_model(widths):
    model = make_model.__wrapped__()
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[1]))
    return model


def test_blocks_are_cached_only_after_their_last_layer():
    import torch

    from kv_pool.integrations.transformers import PagedCache

    sequences = make_sequences()
    request, other = make_request("r", PROMPT), make_request("other", PROMPT)
    sequences.admit(request)
    found = []
    model = make_model.__wrapped__()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda *_: found.append(sequences.manager.get_computed_blocks(other).num_tokens)
        )
    with torch.no_grad():
        model(**PagedCache(sequences, [request], [21]).make_inputs())
    assert found == [0, 0]
    assert sequences.manager.get_computed_blocks(other).num_tokens == 20


def test_invalid_batches_are_rejected():
    import torch

    from kv_pool.integrations.transformers import PagedCache, PagedSequences
    from kv_pool.storage import KVStorage

    sequences = make_sequences(num_blocks=8)
    request, other = make_request("r", PROMPT), make_request("other", (1, 2))
    sequences.admit(request)
    with pytest.raises(InvalidArgumentError, match="at least one row"):
        PagedCache(sequences, [])
    with pytest.raises(InvalidArgumentError, match="new tokens"):
        PagedCache(sequences, [request], [0])
    with pytest.raises(InvalidArgumentError, match="fewer than 22 are new"):
        PagedCache(sequences, [request], [22]).make_inputs()
    with pytest.raises(InvalidArgumentError, match="pass num_new_tokens"):
        PagedCache(sequences, [request]).make_inputs()
    with pytest.raises(InvalidArgumentError, match="2 rows of 3 tokens"):
        make_model()(torch.ones(2, 3, dtype=torch.int64), cache=PagedCache(sequences, [request]))
    cache = PagedCache(sequences, [request])
    with pytest.raises(InvalidArgumentError, match="PagedSequences"):
        cache.crop(-1)
    with pytest.raises(InvalidArgumentError, match="gathers=False"):
        run_step(make_model("kv_pool"), sequences, [request], [21])
    with pytest.raises(OutOfBlocksError, match="0 blocks are free"):
        generate(sequences, [request], 20)
    assert sequences.admit(other) is None
    sequences.free(request)
    with pytest.raises(InvalidArgumentError, match="blocks of 4 tokens"):
        PagedSequences(sequences.manager, KVStorage.allocate(4, 4, 2, 2, 8, "float64", library="torch"))
    with pytest.raises(InvalidArgumentError, match="torch tensors"):
        PagedSequences(sequences.manager, KVStorage.allocate(8, 4, 2, 2, 8, "float64"))


@pytest.mark.parametrize(
    ("options", "num_requests", "said"),
    [
        ({"num_beams": 2}, 2, "beam search replaces rows"),
        ({"num_beams": 2, "do_sample": True}, 2, "beam search replaces rows"),
        ({"num_beams": 2}, 1, "beam search needs PagedCache"),
        ({"num_return_sequences": 2, "do_sample": True}, 1, "needs one request per sequence"),
        ({"prompt_lookup_num_tokens": 2}, 1, "a cache that can be cropped"),  # says transformers
        ({"use_cache": False}, 1, "Are computed tokens fed again"),
    ],
)
def test_unsupported_ways_to_generate_are_rejected(options, num_requests, said):
    """With use_cache=False the tokens used to be wrong without an error."""
    import torch

    from kv_pool.integrations.transformers import PagedCache

    sequences = make_sequences()
    requests = [make_request(str(number), PROMPT) for number in range(num_requests)]
    for request in requests:
        sequences.admit(request)
    input_ids = torch.tensor([PROMPT])
    with pytest.raises(ValueError, match=said):
        make_model().generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            cache=PagedCache(sequences, requests),
            max_new_tokens=6,
            **options,
        )
