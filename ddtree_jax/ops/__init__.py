"""The operations that decide the speed: each folder has a plain reference, an XLA form, and a dispatcher with one signature."""
