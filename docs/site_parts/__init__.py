"""Parts of the site's build: Markdown as GitHub writes it, plain docstrings, charts in tutorials."""
