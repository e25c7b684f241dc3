"""``python -m massieu.cli``."""

from massieu.cli import main

if __name__ == "__main__":
    main()
