"""``python -m hasten``: the command line."""

from hasten.cli import app

if __name__ == "__main__":
    app(prog_name="hasten")
