"""Training a data filtering network on trusted pairs (Fang et al., ICLR 2024)."""
