"""CTranslate2's worker, on a converted folder, in int8. See serve.py.

CTranslate2 does not step token by token from outside. What is timed is its generate_batch: a prompt is read and one
token chosen; decoding starts with one token and chooses greedily, whatever the ids of the request are.
"""

import json
import platform
import time
from pathlib import Path

import ctranslate2
from serve import Request, serve, settings


def main(model: str, threads: int, ctx: int) -> None:
    generator = ctranslate2.Generator(model, compute_type="int8", intra_threads=threads, inter_threads=1)
    tokens = json.loads((Path(model) / "vocabulary.json").read_text(encoding="utf-8"))
    about = {
        "versions": {"ctranslate2": ctranslate2.__version__, "python": platform.python_version()},
        "vocab_size": len(tokens),
    }

    def run(request: Request) -> dict[str, object]:
        if request.depth or len(request.ids) > ctx:
            raise SystemExit("CTranslate2's worker starts with an empty context")
        is_decode = request.rows == 1 and len(request.ids) > 1
        length = len(request.ids) if is_decode else 1
        prompt = [tokens[id_] for id_ in (request.ids[:1] if is_decode else request.ids)]
        start = time.perf_counter()
        results = generator.generate_batch(
            [prompt] * request.batch, max_length=length, min_length=length, end_token=[],
            include_prompt_in_result=False, max_batch_size=request.batch,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        if len(results[0].sequences_ids[0]) != length:
            raise SystemExit(f"CTranslate2 gave {len(results[0].sequences_ids[0])} tokens and not {length}")
        return {"seconds": seconds, "top": results[0].sequences_ids[0][-1]}

    serve(about, run)


if __name__ == "__main__":
    main(**settings())
