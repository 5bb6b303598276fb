"""`python -m meshwright`: the command line where the script is not on the path."""

from meshwright.cli.main import main

if __name__ == "__main__":
    main()
