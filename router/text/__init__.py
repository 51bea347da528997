"""Text in and text out: tokenizer, chat template, incremental detokenizer, stop strings, logprobs."""
