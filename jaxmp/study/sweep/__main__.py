"""Entry point of `python -m jaxmp.study.sweep`; see `jaxmp.study.sweep.runner`."""

from jaxmp.study.sweep.runner import main

if __name__ == '__main__':
    main()
