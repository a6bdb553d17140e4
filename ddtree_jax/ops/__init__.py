"""The operations that decide the speed: each folder has a plain reference, an XLA form and one function for both."""
