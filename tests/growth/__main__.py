"""Run one case or all: `python -m tests.growth [NAME] [SIZE]`."""

import sys

from tests.growth import cases, problem

if __name__ == "__main__":
    names = sys.argv[1:2]
    chosen = [case for case in cases() if not names or case.name == names[0]]
    assert chosen, f"no such case: {names[0]}; there are {', '.join(case.name for case in cases())}"
    problems = [problem(case, int(sys.argv[2]) if sys.argv[2:] else case.size) for case in chosen]
    for line in filter(None, problems):
        print(line, flush=True)
    sys.exit(1 if any(problems) else 0)
