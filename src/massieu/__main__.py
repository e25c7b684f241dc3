"""``python -m massieu``."""

from massieu.cli import main

if __name__ == "__main__":
    main()
