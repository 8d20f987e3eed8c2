"""What a process that multiprocessing starts imports in place of the script of `spec-compat exec`.

The script's `__main__` has this module's name in its spec. multiprocessing runs the module of that
name as `__mp_main__`: it arms the patches, and then the script's code runs in its globals.
"""

from spec_compat.cli import execute

if __name__ == "__mp_main__":
    execute.again(globals())
