"""Tests of capacities: sizes, rates, models and numbers of blocks."""

import json

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.lab.capacity import ModelKV, count_blocks, find_model
from kv_pool.quantities import parse_memory, parse_rate


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1000000", 1_000_000),
        ("512 B", 512),
        ("40gib", 40 * 2**30),
        ("40Gi", 40 * 2**30),
        ("40GB", 40 * 10**9),
        (" 1.5MiB ", 3 * 2**19),
        ("2KiB", 2048),
        ("2kB", 2000),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("0", 0),
    ],
)
def test_sizes_have_decimal_or_binary_units(text, num_bytes):
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "40 XB", "-1GiB", "1e9", "4 0GiB", "40GiBs", "inf", "1.GiB"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(InvalidArgumentError, match="is not a size; write it as 40GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("100MB/s", 1e8), ("1GiB/s", 2**30), (" 5kB ", 5000), ("7/s", 7)]
)
def test_rates_are_sizes_per_second(text, bytes_per_s):
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["fast", "100MB/min", "0", "-1MB/s", "/s"])
def test_invalid_rates_are_refused(text):
    with pytest.raises(InvalidArgumentError, match=r"not a rate|below 1 byte"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3-8b", 131_072),  # 32 layers, K and V, 8 heads of 128, 2 bytes
        ("llama-2-7b", 524_288),
        ("llama-3-70b", 327_680),
        ("qwen2.5-7b", 57_344),
        ("deepseek-v3", 70_272),  # 61 layers of 512 + 64 latent elements
    ],
)
def test_bytes_per_token_of_known_models(name, bytes_per_token):
    assert find_model(name).bytes_per_token == bytes_per_token


def test_unknown_model_error_lists_known_models():
    with pytest.raises(InvalidArgumentError, match=r"'gpt-2'; known are llama-2-7b.*--num-layers"):
        find_model("gpt-2")


def test_element_size_can_be_given():
    assert ModelKV(32, 8, 128, dtype_bytes=1).bytes_per_token == 65_536
    assert ModelKV(61, latent_size=576, dtype_bytes=1).bytes_per_token == 35_136


def test_memory_is_rounded_down_to_blocks():
    block_bytes = 16 * 131_072
    model = find_model("llama-3-8b")
    assert count_blocks(3 * block_bytes, 16, model) == 2
    assert count_blocks(3 * block_bytes - 1, 16, model) == 1


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_memory_for_fewer_than_two_blocks_is_refused(num_blocks):
    block_bytes = 16 * 131_072
    with pytest.raises(InvalidArgumentError, match=f"hold {num_blocks} blocks of {block_bytes} bytes"):
        count_blocks((num_blocks + 1) * block_bytes - 1, 16, find_model("llama-3-8b"))


@pytest.mark.parametrize("model", [ModelKV(0, 8, 128), ModelKV(32, 0, 128), ModelKV(32, 8, 0)])
def test_model_without_kv_is_refused(model):
    with pytest.raises(InvalidArgumentError, match="no KV"):
        count_blocks(2**30, 16, model)


LLAMA_CONFIG = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
EXPERTS_CONFIG = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}
HYBRID_CONFIG = LLAMA_CONFIG | {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}
LATENT_CONFIG = EXPERTS_CONFIG | {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def write_config(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return path


@pytest.mark.parametrize(
    ("config", "name"), [(LLAMA_CONFIG, "llama-3-8b"), (EXPERTS_CONFIG, "qwen3-30b-a3b")]
)
def test_a_configuration_describes_a_known_model(tmp_path, config, name):
    path = write_config(tmp_path, config)
    assert find_model(str(path)) == find_model(str(tmp_path)) == find_model(name)
    assert find_model(name).compute is not None


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (HYBRID_CONFIG, ModelKV(8, 8, 128)),
        (LATENT_CONFIG, find_model("deepseek-v3")),
        (
            {"vision_config": {"num_hidden_layers": 2}, "text_config": LLAMA_CONFIG},
            find_model("llama-3-8b"),
        ),
        ({"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}, ModelKV(12, 12, 64)),
    ],
    ids=["layers without attention", "a latent cache", "images", "heads without groups"],
)
def test_kv_of_other_configurations(tmp_path, config, model):
    path = str(write_config(tmp_path, config))
    found = find_model(path)
    assert (found.num_layers, found.num_kv_heads, found.head_size) == (
        model.num_layers,
        model.num_kv_heads,
        model.head_size,
    )
    if config in (HYBRID_CONFIG, LATENT_CONFIG):
        assert (found, found.compute) == (model, None)


@pytest.mark.parametrize(
    "config",
    [{}, {"num_hidden_layers": 2}, {"num_hidden_layers": "two"}, LLAMA_CONFIG | {"head_dim": 10**400}],
)
def test_configurations_without_dimensions_are_refused(tmp_path, config):
    with pytest.raises(InvalidArgumentError, match=r"config\.json"):
        find_model(str(write_config(tmp_path, config)))


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{}", b'{"layer_types": ["\xe4"]}', b"[" * 10**5, b"{", b'{"hidden_size": 1e999}']
)
def test_configurations_that_are_no_json_are_refused(tmp_path, content):
    """A file that is not UTF-8 raised UnicodeDecodeError."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"cannot read the model configuration .*config\.json"):
        find_model(str(path))


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path):
    path = write_config(tmp_path, LLAMA_CONFIG)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert find_model(str(path)) == find_model("llama-3-8b")


def test_a_missing_configuration_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"cannot read the model configuration .*none\.json"):
        find_model(str(tmp_path / "none.json"))
