"""vLLM's `LLM` on a fake model; prints the number of cached tokens of each request as JSON.

    VLLM_PLUGINS=kv_pool python vllm_engine.py FOLDER [OPTIONS]

OPTIONS is the `kv_pool` object of each request as JSON. The engine runs in its own process, forked as on a
machine with a GPU; only its executor is not vLLM's. The model's configuration is written to FOLDER.
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
    folder, options = Path(sys.argv[1]), [json.loads(text) for text in sys.argv[2:]]
    (folder / "config.json").write_text(json.dumps(MODEL))
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        distributed_executor_backend=FakeExecutor,
        max_model_len=512,
        dtype="float32",
        enable_prefix_caching=True,
        async_scheduling=False,
    )
    prompts = [{"prompt_token_ids": [7] * 100 + [number] * 30} for number in range(8)]
    extra = {"kv_pool": options[0]} if options else None
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, extra_args=extra)
    outputs = [output for _ in range(2) for output in engine.generate(prompts, sampling, use_tqdm=False)]
    print(json.dumps([output.num_cached_tokens for output in outputs]))


if __name__ == "__main__":
    main()
