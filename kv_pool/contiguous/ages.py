"""The age byte of a block: whether it is free, whether it has content, and when that was last used.

0       in use, or the null block
1       free and empty: no request can hit it
2..254  free with content; larger = used later
255     free, in a band above the default one: reused after all others
"""

from typing import Final

IN_USE: Final = 0
EMPTY: Final = 1
YOUNGEST: Final = 254
RETAINED: Final = 255
