"""One generation: prefill, then rounds of draft, expand, verify, walk, commit in a loop on the device."""
