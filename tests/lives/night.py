"""Long lives: `cd tests && python -m lives.night --steps 200000 --seed 0`.

A finding is printed with kind, seed, step and the last 30 operations; the exit status is 1 then.
"""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from lives.life import KINDS, Life

REPORT_S = 30.0


def run(kind, seed, num_steps, steps_per_life):
    """Run lives of `steps_per_life` steps until `num_steps` are done; False if one had a finding."""
    started = reported = time.monotonic()
    num_done = 0
    while num_done < num_steps:
        count = min(steps_per_life, num_steps - num_done)
        with tempfile.TemporaryDirectory() as folder:
            life = Life(kind, seed, Path(folder))
            try:
                life.run(count)
            except Exception:
                traceback.print_exc()
                print(f"FOUND after {num_done + life.num_steps} steps: {life.describe()}", flush=True)
                return False
        num_done += count
        seed += 1
        if time.monotonic() - reported > REPORT_S:
            reported = time.monotonic()
            rate = num_done / (reported - started)
            print(f"{kind}: {num_done} of {num_steps} steps, {rate:.0f} a second", flush=True)
    print(f"{kind}: {num_done} steps, nothing found; {dict(life.world.tally)}", flush=True)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="of each kind of life")
    parser.add_argument("--seed", type=int, default=0, help="of the first life; each next one has the next")
    parser.add_argument("--life", type=int, default=3000, help="steps of one life")
    parser.add_argument("--kind", choices=KINDS, action="append", help="all by default")
    options = parser.parse_args()
    results = [run(kind, options.seed, options.steps, options.life) for kind in options.kind or KINDS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
