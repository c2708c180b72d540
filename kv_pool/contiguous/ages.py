"""The age of a block, one byte: whether it is free, has content, and how long ago that was used.

0       in use, or the null block
1       free and empty: nobody can hit it
2..254  free with content, larger = used later
255     free, in a band above the default one: reused after all others
"""

from typing import Final

IN_USE: Final = 0
EMPTY: Final = 1
YOUNGEST: Final = 254
KEPT: Final = 255
