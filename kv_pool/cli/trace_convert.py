"""`kv-pool trace convert`: read and write traces and request logs of other projects."""

from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.setting_options import takes
from kv_pool.cli.trace_generate import Output
from kv_pool.replay.formats.convert import READ_LOSSES, WRITE_LOSSES, ConvertSettings, convert_trace


@takes(
    ConvertSettings,
    "source source_format output target_format block_size trace_block_size session_gap timestamp_unit "
    "skip_broken",
)
def convert(settings: ConvertSettings, output: Output) -> None:
    """Convert a trace or a request log. Prints what the formats cannot hold.

    Reads Mooncake's, kv-cache-tester's (Weka's) and Qwen-Bailian's traces, LMCache's lookup logs, vLLM's and
    Dynamo's request logs, CSV files of lengths (Azure, BurstGPT, inference-perf), and recorded event streams
    of kv_pool (kv-pool events --json). Writes the first two, and logs.
    """
    report = convert_trace(settings, output)
    ids = "token ids" if report.block_size is None else f"{report.block_size} tokens per hash id"
    print(f"{escape_text(output)}: {report.num_requests:,} requests, {ids}")
    if report.num_broken:
        first = escape_text(report.first_broken or "")
        print(f"skipped: {report.num_broken:,} broken lines; the first: {first}")
    if report.num_late:
        print(f"late: {report.num_late:,} requests arrive before one that is written earlier")
    for note in report.notes:
        print(f"note: {escape_text(note)}")
    for loss in READ_LOSSES[settings.source_format]:
        print(f"not in {settings.source_format}: {loss}")
    for loss in WRITE_LOSSES[settings.target_format]:
        print(f"lost in {settings.target_format}: {loss}")
