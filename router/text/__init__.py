"""Text in and text out: tokenizer, chat template, incremental detokenizer, stop strings.

Imported by `http` and by `cluster.lab`. The only folder of the router that may import transformers. Must not know HTTP.
"""
