"""``python -m sglang_moe_autotune``: the shell, where its script is not on the PATH."""

from sglang_moe_autotune.cli import main

if __name__ == "__main__":
    main(prog_name="sglang-moe-autotune")
