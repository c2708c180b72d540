"""The Triton kernel of attention over blocks: prefill and decode, one program per tile of query tokens."""

import triton.language as tl


def attend_over_blocks(
    query,  # (num_tokens, num_heads, head_size)
    key_cache,  # (num_blocks, block_size, num_kv_heads, head_size), as is value_cache
    value_cache,
    output,  # (num_splits, num_tokens, num_heads, head_size), contiguous
    sum_logs,  # (num_splits, num_tokens, num_heads), float32, contiguous
    block_tables,  # (num_seqs, columns), int32, contiguous
    seq_lens,  # (num_seqs,), int32
    query_start_loc,  # (num_seqs + 1,), int32
    num_tokens,
    columns,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    scale,  # of the scores, for exponentials to base 2
    sliding_window,  # tokens; 0: all
    num_splits,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads per KV head
    group_rows: tl.constexpr,  # a power of two, at least `group`
    tile_tokens: tl.constexpr,  # tile_tokens * group_rows is a power of two, at least 16
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    head_columns: tl.constexpr,  # a power of two, at least `head_size` and 16
    chunk_tokens: tl.constexpr,  # a power of two, at least 16
):
    """Compute attention of one tile of a sequence's query tokens, for the query heads of one KV head.

        program axes:  0 sequence   1 tile of its query tokens   2 KV head, and split of its K and V
        row r of a tile:  query token r // group_rows, query head r % group_rows of the KV head

    Softmax is computed online, chunk by chunk. With several splits, each writes its own result and
    `sum_logs`, which weights it in the merge; an empty split writes -inf there.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    first_row = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - first_row
    first_token = tl.program_id(1) * tile_tokens
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + sequence)
    num_rows: tl.constexpr = tile_tokens * group_rows
    row = tl.arange(0, num_rows)
    token = first_token + row // group_rows
    head = row % group_rows
    is_row = (token < query_len) & (head < group)
    position = seq_len - query_len + token
    element = tl.arange(0, head_columns)
    is_element = element < head_size
    is_cell = is_row[:, None] & is_element[None, :]
    head = kv_head * group + head
    query_row = (first_row + token).to(tl.int64) * query_token_stride + head * query_head_stride
    tile = tl.load(query + query_row[:, None] + element[None, :], mask=is_cell, other=0.0)

    # |<- not seen by window ->|<- split 0 ->|<- split 1 ->| ... |<- not seen by the tile's last token
    stop = tl.minimum(seq_len - query_len + first_token + tile_tokens, seq_len)
    start = 0
    if sliding_window > 0:
        start = tl.maximum(seq_len - query_len + first_token - sliding_window + 1, 0)
        start = start // chunk_tokens * chunk_tokens
    split_tokens = tl.cdiv(tl.cdiv(stop - start, num_splits), chunk_tokens) * chunk_tokens
    start += split * split_tokens
    stop = tl.minimum(stop, start + split_tokens)

    highest = tl.full((num_rows,), float("-inf"), tl.float32)
    total = tl.zeros((num_rows,), tl.float32)
    attended = tl.zeros((num_rows, head_columns), tl.float32)
    table = block_tables + sequence.to(tl.int64) * columns
    for chunk in range(start, stop, chunk_tokens):
        place = chunk + tl.arange(0, chunk_tokens)
        is_place = place < stop
        if sliding_window > 0:
            # Blocks before the window may have been freed; their table entries are not read.
            is_place = is_place & (place > seq_len - query_len + first_token - sliding_window)
        block = tl.load(table + place // block_size, mask=is_place, other=0).to(tl.int64)
        offset = place % block_size
        key_row = block * key_block_stride + offset * key_token_stride + kv_head * key_head_stride
        is_kv = is_place[:, None] & is_element[None, :]
        key = tl.load(key_cache + key_row[:, None] + element[None, :], mask=is_kv, other=0.0)
        scores = tl.dot(tile, tl.trans(key), input_precision="ieee") * scale
        is_seen = is_place[None, :] & (place[None, :] <= position[:, None])
        if sliding_window > 0:
            is_seen = is_seen & (place[None, :] > position[:, None] - sliding_window)
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # For a row without visible scores so far, -inf minus -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weights, 1)
        value_row = block * value_block_stride + offset * value_token_stride + kv_head * value_head_stride
        value = tl.load(value_cache + value_row[:, None] + element[None, :], mask=is_kv, other=0.0)
        attended = attended * fade[:, None]
        attended += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = higher
    total = tl.where(total == 0.0, 1.0, total)  # no visible score; `highest` is -inf
    attended = attended / total[:, None]
    num_heads = num_kv_heads * group
    out_row = (split.to(tl.int64) * num_tokens + first_row + token) * num_heads + head
    tl.store(
        output + out_row[:, None] * head_size + element[None, :],
        attended.to(output.dtype.element_ty),
        mask=is_cell,
    )
    if num_splits > 1:
        tl.store(sum_logs + out_row, highest + tl.log2(total), mask=is_row)
