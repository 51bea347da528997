"""`vllm bench serve` without the rest of vLLM's command line, which imports vLLM's own server and all that it needs.

Runs in the environment that `environments.py` made for vLLM; knows nothing of homing.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
