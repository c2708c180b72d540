"""Replay the first 2,000 requests of the bundled trace through caches of three sizes.

Run it: python examples/replay_a_trace.py
"""

from kv_pool.lab import ReplaySettings, run_replay

print("blocks   token hit rate   evictions")
for num_blocks in (1_000, 5_000, 25_000):
    report = run_replay(ReplaySettings("mooncake_conversation", num_blocks, limit=2_000))
    print(f"{num_blocks:>6,}   {report.token_hit_rate:>14.1%}   {report.evictions:>9,}")

# prints:
# blocks   token hit rate   evictions
#  1,000             4.2%      49,298
#  5,000            12.6%      40,800
# 25,000            28.8%      12,104
