"""`python -m sdp` is `sdp`, which begins here."""

import sys


def main() -> int:
    """Run the command line; end in one line also on Ctrl-C before it handles signals."""
    try:
        from sdp.cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("sdp: stopped by SIGINT; run it again\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
