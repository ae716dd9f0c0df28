"""tfm show: what a model is, and what it would take to run it."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tfm.cli.options import Command, quiet_option, ref_argument
from tfm.cli.output import Notes, Output
from tfm.cli.units import size, table

if TYPE_CHECKING:
    from tfm.engine.summary import Summary


@click.command("show", cls=Command)
@ref_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@quiet_option
@click.pass_obj
def command(output: Output, ref: str, as_json: bool, quiet: bool) -> None:
    """Tell what a model is and what it needs.

    \b
    Examples:
      tfm show smollm2-135m
      tfm show ./my-checkpoint
      tfm show --json HuggingFaceTB/SmolLM2-360M-Instruct | jq .memory

    A model that is not on this disk is fetched first. What tfm does not support is told, by field or tensor.
    """
    from tfm.engine.hub import resolve
    from tfm.engine.summary import summarize

    with Notes(quiet) as notes:
        summary = summarize(resolve(ref, notes.progress))
    if as_json:
        output.write_line(json.dumps(_as_json(ref, summary), ensure_ascii=False))
        return
    for line in table(list(_rows(summary))):
        output.write_line(line)


def _as_json(ref: str, summary: "Summary") -> dict[str, Any]:
    config = summary.config
    return {
        "model": ref,
        "folder": str(summary.folder),
        "model_type": summary.model_type,
        "parameters": summary.parameters,
        "formats": summary.formats,
        "num_hidden_layers": config.num_hidden_layers if config else None,
        "hidden_size": config.hidden_size if config else None,
        "vocab_size": config.vocab_size if config else None,
        "context": config.max_position_embeddings if config else None,
        "chat_template": summary.has_chat_template,
        "memory": asdict(summary.memory) if summary.memory else None,
        "unsupported": summary.unsupported,
    }


def _rows(summary: "Summary") -> Iterator[tuple[str, str]]:
    yield "folder", str(summary.folder)
    yield "architecture", summary.model_type or "unknown"
    if summary.config:
        config, layer = summary.config, summary.config.layers[0]
        plural = "" if config.num_hidden_layers == 1 else "s"
        vocabulary = f"vocabulary {config.vocab_size:,}"
        yield "", f"{config.num_hidden_layers} layer{plural}, hidden size {config.hidden_size:,}, {vocabulary}"
        heads = f"{layer.num_attention_heads} heads of {layer.head_dim}, {layer.num_key_value_heads} of them with keys"
        yield "", f"{heads}; MLP {layer.intermediate_size:,}" if layer.intermediate_size else f"{heads}; no MLP"
    if summary.parameters is not None:
        yield "parameters", f"{size(summary.parameters)} ({summary.parameters:,})"
    for index, (name, nbytes) in enumerate(summary.formats.items()):
        yield "" if index else "formats", f"{size(nbytes)}B in {name}"
    if summary.config:
        yield "context", f"{summary.config.max_position_embeddings:,} tokens"
    if summary.has_chat_template is not None:
        yield "chat", "yes, it has a chat template" if summary.has_chat_template else "no, it continues text"
    if summary.memory:
        memory = summary.memory
        yield "memory", f"{size(memory.weights_bytes)}B for the weights"
        yield "", f"{size(memory.kv_bytes_per_1000_tokens)}B for every 1,000 tokens of context"
        yield "", f"{size(memory.scratch_bytes)}B of scratch"
    yield "runs", "yes" if summary.unsupported is None else f"no: {summary.unsupported}"
