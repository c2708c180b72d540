"""Which errors bytes from outside can cause, so that each reader raises its own typed error for all."""

import msgspec

UNDECODABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What decoding raises for bytes that are not what they should be: truncated, of the wrong types, nested too
deeply, text that is not UTF-8. Several `KVPoolError`s are ValueErrors: catch these around decoding alone."""

UNENCODABLE = (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError)
"""What encoding raises for values without a form on the wire: text with lone surrogates, integers of over 64
bits."""
