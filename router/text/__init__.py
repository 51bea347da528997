"""Text in and text out: tokenizer, chat template, incremental detokenizer, stop strings.

Imported by `http` and `cluster.lab`. No other folder of the router may import transformers. Must not depend on HTTP.
"""
