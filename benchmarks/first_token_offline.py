"""Program that generates one token with the class LLM, for bench-first-token.

    python benchmarks/first_token_offline.py MODEL BEGAN

It prints the seconds by part as JSON. BEGAN is the time.time() at which it was started.
"""

from __future__ import annotations

import json
import sys
import time

from worker.serving.startup import Startup


def main() -> None:
    began = float(sys.argv[2])
    startup = Startup()
    startup.seconds["interpreter"] = round(time.time() - began, 3)
    with startup.part("import of LLM"):
        from cluster.llm.llm import LLM
    with startup.part("LLM"):
        llm = LLM(sys.argv[1])
    with llm:
        with startup.part("first token"):
            stream = llm.stream("Once upon a time", max_tokens=2, temperature=0)
            next(stream)
        in_all = time.time() - began
        stream.close()
    json.dump(startup.seconds | {"in all": round(in_all, 3)}, sys.stdout)


if __name__ == "__main__":
    main()
