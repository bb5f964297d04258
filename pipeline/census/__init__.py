"""What is in a pool, counted in one streaming pass (after Elazar et al., What's In My Big Data, ICLR 2024)."""
