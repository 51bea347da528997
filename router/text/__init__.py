"""Text in and text out: tokenizer, chat template, incremental detokenizer, stop strings, logprobs.

Imported by `http`. The only folder of the router that may import transformers.
"""
