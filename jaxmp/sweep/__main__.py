"""Entry point of `python -m jaxmp.sweep`; see `jaxmp.sweep.runner`."""

from jaxmp.sweep.runner import main

if __name__ == '__main__':
    main()
