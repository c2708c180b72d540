"""vLLM's `LLM` on a fake model serves one request with options; prints the number of generated tokens.

    VLLM_PLUGINS=kv_pool KV_POOL_VLLM=manager python python_engine.py FOLDER OPTIONS

OPTIONS is the `kv_pool` object as JSON. The engine runs in its own process, forked as on a machine with a
GPU; only its executor is not vLLM's.
"""

import json
import sys
from pathlib import Path

from integrations.fake_executor import FakeExecutor
from integrations.made_scheduler import MODEL
from integrations.start_method import keep_start_method


def main():
    from vllm import LLM, SamplingParams

    keep_start_method()
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    (folder / "config.json").write_text(json.dumps(MODEL))
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        distributed_executor_backend=FakeExecutor,
        max_model_len=256,
        dtype="float32",
        async_scheduling=False,
    )
    sampling = SamplingParams(
        max_tokens=2, ignore_eos=True, detokenize=False, extra_args={"kv_pool": options}
    )
    prompts = [{"prompt_token_ids": list(range(start, start + 40))} for start in (100, 200)]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    print(json.dumps([len(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
