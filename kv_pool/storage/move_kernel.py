"""The Triton kernel that copies blocks: every layer, K and V, in one launch."""

import triton.language as tl


def copy_pieces(
    pieces,  # (num_pieces, 5), int64: source base, source stride, target base, target stride, bytes
    sources,  # (num_moves,), int64, block ids
    targets,  # (num_moves,), int64, block ids
    num_pieces,
    num_items,  # num_moves * num_pieces
    word: tl.constexpr,  # element type of the loads and stores
    word_bytes: tl.constexpr,
    piece_words: tl.constexpr,  # the longest piece, a power of 2
    alignment: tl.constexpr,  # bytes that divide every base, stride and length of a piece
):
    """Copy piece p of block sources[m] to block targets[m], for every move m and every piece p.

        item  =  m * num_pieces + p        program i copies items i, i + programs, i + 2 * programs, ...

    A piece is a span or part of a span, so adjacent programs copy adjacent bytes. With an alignment of 16
    bytes, four 4-byte words are one load. The alignment hint must be on the pointer: the compiler loses a
    hint on the integer address.
    """
    words = tl.arange(0, piece_words)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        move = item // num_pieces
        piece = pieces + (item % num_pieces) * 5
        source = tl.load(piece) + tl.load(piece + 1) * tl.load(sources + move)
        target = tl.load(piece + 2) + tl.load(piece + 3) * tl.load(targets + move)
        source_words = tl.multiple_of(source.to(tl.pointer_type(word)), alignment)
        target_words = tl.multiple_of(target.to(tl.pointer_type(word)), alignment)
        num_words = tl.multiple_of(tl.load(piece + 4) // word_bytes, alignment // word_bytes)
        is_in_piece = words < num_words
        tl.store(
            target_words + words,
            tl.load(source_words + words, mask=is_in_piece),
            mask=is_in_piece,
        )
