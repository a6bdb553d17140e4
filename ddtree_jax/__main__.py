"""`python -m ddtree_jax` is the command `ddtree-jax`."""

from ddtree_jax.cli import main

raise SystemExit(main())
