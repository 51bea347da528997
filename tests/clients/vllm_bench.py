"""`vllm bench serve` without the rest of vLLM's command line, which imports vLLM's server and all its dependencies.

Runs in the environment that `environments.py` made for vLLM; does not use homing.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
