"""The forward pass: embedding -> blocks -> unembedding. One function for all models, formats, batches. Read it first.

The residual stream x [T, D] holds a row for each new token. A block adds to it twice:

    x = x + H(x)        heads: each reads where its queries look (A), and writes what its values carry (the OV circuit)
    x = x + MLP(x)

and the unembedding reads logits off the last x. What differs between models stands in the layer table (records.py), one
row a layer.

All threads of the team run `forward` together, each on its slice: of the outputs of a matmul, of the heads, of the rows
of a norm. They wait for each other where one reads what another wrote: five times a block, and before a matmul of many
rows once more.

Shapes: T rows (of any sequences, at any positions), D hidden, F feed-forward, N query heads, K key heads, V vocabulary.
"""

from typing import Any

from tfm.engine.records import FEW_ROWS, LAYER, STEP
from tfm.kernels.activation import activate_row
from tfm.kernels.attention import attend_piece, merge_segments
from tfm.kernels.embedding import add_row, embed_row
from tfm.kernels.formats import begin_of
from tfm.kernels.jit import jit
from tfm.kernels.kv_block import append_key, append_value, bytes_of_head
from tfm.kernels.matmul import activations_at, multiply_piece
from tfm.kernels.norm import normalize
from tfm.kernels.quantize import quantize_row
from tfm.kernels.records import BLOCK_ROWS, KV_BLOCK, KV_TYPES, LANES, NORMS, Q8, SPAN, THREAD
from tfm.kernels.rope import rotate
from tfm.kernels.simd import AHEAD_BYTES, address_of, peek_i64, poke_i64, prefetch, record_at
from tfm.kernels.team import barrier, begin_step, next_step, publish, share

LAYER_BYTES, SPAN_BYTES = LAYER.itemsize, SPAN.itemsize
NO_NORM = NORMS["none"]
KV_Q8 = KV_TYPES["q8"]

Record = Any  # a record of records.py or kernels/records.py, as compiled code sees it

step_at, layer_at, span_at, thread_at = record_at(STEP), record_at(LAYER), record_at(SPAN), record_at(THREAD)


@jit
def is_quantized(matrix: Record) -> bool:
    """Whether the matrix reads activations of int8."""
    return matrix.format >= Q8  # type: ignore[no-any-return]


@jit
def forward(step: Record, me: Record) -> None:
    """One step: every thread of the team calls it with the same step (STEP) and its own record (THREAD).

    Keys and values of the T rows are appended to their sequences' cache blocks, and the logits of the rows that were
    asked for are written to step.logits, float32 [num_logit_rows, V padded to 16].
    """
    embed(step, me)
    for i in range(step.num_layers):
        layer = layer_at(step.layers + i * LAYER_BYTES)
        add_heads(step, layer, me, step.claims + 8 * i)
        if layer.up_proj.data != 0:
            add_mlp(step, layer, me)
    unembed(step, me)
    # Nobody reads the step any more: who comes first may change it for the next one.
    barrier(me)


@jit
def multiply(
    matrix: Record, read: Record, begin: int, end: int, first: int, last: int,
    out: int, stride: int, add: int, me: Record,
) -> None:  # fmt: skip
    """out = W read, or out + W read where `add` is not 0: rows begin .. end - 1 and panels first .. last - 1."""
    multiply_piece((address_of(matrix), address_of(read), begin, end, first, last, out, stride, add, me.scratch))


@jit
def ask_for(matrix: Record, me: Record) -> None:
    """Ask for the beginning of this thread's share of a matrix. Memory would stand idle while its rows are made ready.

    So a step takes 1 to 3 % less where two threads want more than memory gives, and 4 to 13 % less where they do not.
    """
    first, _ = share(matrix.panels, me)
    begin = begin_of(matrix, first)
    for line in range(0, AHEAD_BYTES, 64):
        prefetch(begin + line)


@jit
def embed(step: Record, me: Record) -> None:
    """x = the embedding of each token (and of its position, where positions are learned). No tile is claimed yet."""
    if me.index == 0:
        for i in range(step.num_layers):
            poke_i64(step.claims + 8 * i, 0)
    first, last = share(step.rows, me)
    for i in range(step.num_spans):
        span = span_at(step.spans + i * SPAN_BYTES)
        for t in range(max(first, span.first), min(last, span.first + span.count)):
            x = step.x + t * step.x_stride
            embed_row(step.embed_tokens, peek_i64(step.tokens + 8 * t), x)
            if step.position_embeddings != 0:
                position = span.position + t - span.first
                add_row(step.position_embeddings + position * step.x_stride, step.hidden_size, x)
    barrier(me)


@jit
def add_heads(step: Record, layer: Record, me: Record, claims: int) -> None:
    """x = x + H(x), the sum over the heads of A(x) x S with S = W_V W_O."""
    heads = layer.heads
    quantized = is_quantized(layer.q_proj) or is_quantized(layer.k_proj) or is_quantized(layer.v_proj)
    read = norm_rows(step, me, layer.attn_norm, step.x, step.x_stride, step.hidden_size, 0, step.rows, quantized)
    project_heads(step, layer, me, read)
    barrier(me)
    ask_for(layer.o_proj, me)
    attend_piece((
        address_of(me), step.kv_type, address_of(heads), step.spans, step.num_spans, layer.cache_offset,
        step.heads_out, step.heads_stride, step.attended, step.attended_stride,
        claims, step.segments, step.partials, step.partial_bytes,
    ))  # fmt: skip
    barrier(me)
    if step.segments != 0:
        merge_segments(
            me, heads, step.spans, step.num_spans, step.attended, step.attended_stride,
            step.segments, step.partials, step.partial_bytes,
        )  # fmt: skip
        barrier(me)
    columns = heads.num_attention_heads * heads.head_dim
    ask_for(layer.o_proj, me)  # attention may have driven it out of the nearest cache
    read = copy_rows(step, me, step.attended, step.attended_stride, columns, is_quantized(layer.o_proj))
    add_product(step, me, layer.o_proj, read)


@jit
def project_heads(step: Record, layer: Record, me: Record, read: Record) -> None:
    """Queries and keys of this thread's heads, turned by their positions, and its panels of values; keys and values go
    into the cache.

    Values are shared out by panels, as nothing joins the elements of a head: with 9 heads of queries and 3 of keys and
    values each of two threads has half of the work, where one had 8 of 15 heads.
    """  # fmt: skip
    heads = layer.heads
    num_q, num_kv, size = heads.num_attention_heads, heads.num_key_value_heads, heads.head_size
    panels = size // LANES
    first_q, last_q, first_k, last_k = share_heads(heads, me)
    project_some(layer.q_proj, step, me, read, first_q * panels, last_q * panels, 0)
    project_some(layer.k_proj, step, me, read, first_k * panels, last_k * panels, num_q * size)
    first_value, last_value = share_values(heads, step.kv_type, me)
    project_some(layer.v_proj, step, me, read, first_value, last_value, (num_q + num_kv) * size)
    for i in range(step.num_spans):
        span = span_at(step.spans + i * SPAN_BYTES)
        for j in range(span.count):
            position = span.position + j
            block = peek_i64(span.blocks + 8 * (position // KV_BLOCK)) + layer.cache_offset
            row = step.heads_out + (span.first + j) * step.heads_stride
            for h in range(first_q, last_q):
                turn_head(layer.rope, position, row + 4 * size * h)
            for h in range(first_k, last_k):
                head, vector = block + h * bytes_of_head(step.kv_type, size), row + 4 * size * (num_q + h)
                turn_head(layer.rope, position, vector)
                append_key(step.kv_type, head, position % KV_BLOCK, heads.head_dim, size, vector)
            for h in range(first_value // panels, -(-last_value // panels)):
                head, vector = block + h * bytes_of_head(step.kv_type, size), row + 4 * size * (num_q + num_kv + h)
                begin, end = max(0, first_value - h * panels), min(panels, last_value - h * panels)
                append_value(step.kv_type, head, position % KV_BLOCK, size, begin * LANES, end * LANES, vector)


@jit
def turn_head(rope: Record, position: int, vector: int) -> None:
    """Turn the query or key at `vector` by its position, where the layer has rotary embedding."""
    if rope.half != 0:
        turn = 4 * rope.half * position
        rotate(vector, rope.cos + turn, rope.sin + turn, rope.half, rope.interleaved)


@jit
def share_heads(heads: Record, me: Record) -> tuple[int, int, int, int]:
    """This thread's heads, first and last + 1 of the queries and of the keys. In the order that is shared out each key
    comes after the queries that read it: to keep a key takes longer than to turn a query."""
    num_kv = heads.num_key_value_heads
    group = heads.num_attention_heads // num_kv
    first, last = share((group + 1) * num_kv, me)
    first_k, last_k = first // (group + 1), last // (group + 1)
    return group * first_k + first % (group + 1), group * last_k + last % (group + 1), first_k, last_k


@jit
def share_values(heads: Record, kv_type: int, me: Record) -> tuple[int, int]:
    """This thread's panels of values, first and last + 1. In q8 whole heads: the elements of one share a scale."""
    panels = heads.head_size // LANES
    unit = panels if kv_type == KV_Q8 else 1
    first, last = share(heads.num_key_value_heads * panels // unit, me)
    return first * unit, last * unit


@jit
def project_some(matrix: Record, step: Record, me: Record, read: Record, first: int, last: int, begin: int) -> None:
    """Panels first .. last - 1, if any, of a matrix whose outputs begin at element `begin` of a row."""
    if first < last:
        multiply(matrix, read, 0, step.rows, first, last, step.heads_out + 4 * begin, step.heads_stride, 0, me)


@jit
def add_mlp(step: Record, layer: Record, me: Record) -> None:
    """x = x + MLP(x), MLP(x) = W_down act(W_up x), or W_down (act(W_gate x) * W_up x)."""
    quantized = is_quantized(layer.up_proj) or (layer.gated and is_quantized(layer.gate_proj))
    ask_for(layer.gate_proj if layer.gated else layer.up_proj, me)
    read = norm_rows(step, me, layer.mlp_norm, step.x, step.x_stride, step.hidden_size, 0, step.rows, quantized)
    first, last = share(layer.up_proj.panels, me)
    gate, up, stride = step.gate + 4 * LANES * first, step.up + 4 * LANES * first, step.mlp_stride
    for begin in range(0, step.rows, BLOCK_ROWS):
        end = min(step.rows, begin + BLOCK_ROWS)
        if layer.gated:
            multiply(layer.gate_proj, read, begin, end, first, last, step.gate, stride, 0, me)
        multiply(layer.up_proj, read, begin, end, first, last, step.up, stride, 0, me)
        for t in range(begin, end):
            h = up + t * stride
            activate_row(layer.hidden_act, layer.gated, gate + t * stride, h, LANES * (last - first), h)
    barrier(me)
    ask_for(layer.down_proj, me)
    read = copy_rows(step, me, step.up, stride, layer.up_proj.rows, is_quantized(layer.down_proj))
    add_product(step, me, layer.down_proj, read)


@jit
def add_product(step: Record, me: Record, matrix: Record, read: Record) -> None:
    """x = x + W read."""
    first, last = share(matrix.panels, me)
    multiply(matrix, read, 0, step.rows, first, last, step.x, step.x_stride, 1, me)
    barrier(me)


@jit
def unembed(step: Record, me: Record) -> None:
    """The logits of the rows that were asked for: W_U norm(x)."""
    if step.num_logit_rows == 0:
        return
    quantized = is_quantized(step.lm_head)
    ask_for(step.lm_head, me)
    read = norm_rows(
        step, me, step.norm, step.x, step.x_stride, step.hidden_size, step.logit_rows, step.num_logit_rows, quantized
    )  # fmt: skip
    first, last = share(step.lm_head.panels, me)
    rows, stride = step.num_logit_rows, step.logits_stride
    multiply(step.lm_head, read, 0, rows, first, last, step.logits, stride, 0, me)


@jit
def norm_rows(
    step: Record, me: Record, norm: Record, source: int, stride: int, columns: int,
    picked: int, rows: int, quantized: bool,
) -> Record:  # fmt: skip
    """The rows that a matmul reads: norm(source), and as int8 where a quantised matrix reads them.

    picked is the address of the row numbers, 0 for all in order.
    """
    few = rows <= FEW_ROWS
    acts = activations_at(me.activations if few else step.activations)
    first, last = (0, rows) if few else share(rows, me)
    for t in range(first, last):
        row = peek_i64(picked + 8 * t) if picked != 0 else t
        values = acts.values + t * acts.stride
        normalize(norm.kind, source + row * stride, columns, norm.eps, norm.weight, norm.bias, values)
        if quantized:
            quantized_row, groups = acts.quantized + t * acts.quantized_stride, acts.groups + t * acts.groups_stride
            quantize_row(values, columns, quantized_row, groups)
    if not few:
        barrier(me)
    return acts


@jit
def copy_rows(step: Record, me: Record, source: int, stride: int, columns: int, quantized: bool) -> Record:
    """The same without a norm."""
    few = step.rows <= FEW_ROWS
    acts = activations_at(me.activations if few else step.activations)
    first, last = (0, step.rows) if few else share(step.rows, me)
    for t in range(first, last):
        row = source + t * stride
        if quantized:
            quantize_row(row, columns, acts.quantized + t * acts.quantized_stride, acts.groups + t * acts.groups_stride)
        else:
            normalize(NO_NORM, row, columns, 0.0, 0, 0, acts.values + t * acts.stride)
    if not few:
        barrier(me)
    return acts


@jit
def run(thread: int) -> int:
    """The entry: thread 0 gives out one step and runs it; a helper runs all that are given out, until the team ends.

    Gives how many ns thread 0 waited for the others.
    """
    me = thread_at(thread)
    if me.index != 0:
        while next_step(me):
            forward(step_at(me.work), me)
        return 0
    begin_step(me)
    if me.threads > 1:
        publish(me.team)
    forward(step_at(me.work), me)
    waited_ns: int = me.waited_ns
    return waited_ns
