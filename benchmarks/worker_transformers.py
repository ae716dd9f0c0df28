"""The worker of transformers with torch, in float32, on a checkpoint folder. See serve.py."""

import os
import platform
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
import transformers
from serve import Request, serve, settings


def main(model: str, threads: int, ctx: int) -> None:
    torch.set_num_threads(threads)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if loaded.config.max_position_embeddings < ctx:
        raise SystemExit(f"{model} has no {ctx} positions")
    about = {
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "vocab_size": loaded.config.vocab_size,
    }

    @torch.inference_mode()
    def run(request: Request) -> dict[str, object]:
        if request.depth:
            raise SystemExit("transformers' worker starts with an empty context")
        parts = [torch.tensor([part] * request.batch) for part in request.parts()]
        past: dict[str, object] = {}
        start = time.perf_counter()
        for part in parts:
            out = loaded(part, use_cache=True, logits_to_keep=1, **past)
            past = {"past_key_values": out.past_key_values}
        return {"seconds": time.perf_counter() - start, "top": int(out.logits[0, -1].argmax())}

    serve(about, run)


if __name__ == "__main__":
    main(**settings())
