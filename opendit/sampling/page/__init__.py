"""``opendit page``: runs, samples and comparisons in a browser (docs/page.md)."""
