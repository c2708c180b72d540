"""The errors that decoding and encoding of external data can raise, for callers to catch together."""

import msgspec

UNDECODABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""Errors of decoding invalid bytes: truncated, wrong types, nested too deeply, or not UTF-8. Some
`KVPoolError`s are ValueErrors too, so put only the decoding into the `try` block."""

UNENCODABLE = (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError)
"""Errors of encoding values that have no encoding: text with lone surrogates, integers over 64 bits."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Begins UTF-8 files of Windows, and their parts where files were joined. JSON does not allow it."""
