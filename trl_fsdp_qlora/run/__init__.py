"""Parts that every run needs: launching, input checks, error lines, config fields, redaction."""
