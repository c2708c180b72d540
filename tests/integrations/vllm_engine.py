"""A complete vLLM, in its own processes, on a fake model; prints the computed steps as JSON.

    VLLM_PLUGINS=kv_pool python vllm_engine.py FOLDER

Only the executor is not vLLM's: it records what the scheduler sends to the workers, and answers with
numbers. The model's configuration and the records are written to FOLDER.
"""

import json
import os
import sys
from pathlib import Path

from fake_executor import FakeExecutor
from made_scheduler import MODEL
from start_method import keep_start_method


class NotingExecutor(FakeExecutor):
    """A `FakeExecutor` that records one line per step."""

    def _init_executor(self):
        super()._init_executor()
        self.notes = Path(os.environ["NOTES"])

    def execute_model(self, output, non_block=False):
        more = output.scheduled_cached_reqs
        new = [[request.block_ids, request.num_computed_tokens] for request in output.scheduled_new_reqs]
        note = [list(output.num_scheduled_tokens.values()), new, more.new_block_ids, more.num_computed_tokens]
        with self.notes.open("a") as notes:
            print(json.dumps(note), file=notes)
        return super().execute_model(output, non_block)


def main():
    from vllm import LLM, SamplingParams

    keep_start_method()
    folder = Path(sys.argv[1])
    (folder / "config.json").write_text(json.dumps(MODEL))
    os.environ["NOTES"] = str(folder / "notes")
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        distributed_executor_backend=NotingExecutor,
        max_model_len=512,
        dtype="float32",
        enable_prefix_caching=True,
        async_scheduling=False,
    )
    prompts = [{"prompt_token_ids": [7] * 100 + [number] * 30} for number in range(8)]
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False)
    cached = []
    for _ in range(2):
        cached += [output.num_cached_tokens for output in engine.generate(prompts, sampling, use_tqdm=False)]
    print(json.dumps({"cached": cached, "steps": (folder / "notes").read_text().splitlines()}))


if __name__ == "__main__":
    main()
