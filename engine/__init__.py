"""Token ids in, token ids out: checkpoints, tokenizer, forward pass, cache, sampling. Prints nothing."""
