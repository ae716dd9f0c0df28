"""`tfm generate -n 1 PROMPT` by llama-cpp-python: python start_llama_cpp.py GGUF THREADS PROMPT prints one token."""

import sys

from llama_cpp import Llama


def main(gguf: str, threads: int, prompt: str) -> None:
    llama = Llama(gguf, n_threads=threads, n_threads_batch=threads, verbose=False)
    messages = [{"role": "user", "content": prompt}]
    for chunk in llama.create_chat_completion(messages, max_tokens=1, temperature=0.0, stream=True):
        print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
