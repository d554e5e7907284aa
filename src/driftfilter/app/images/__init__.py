"""Images: filters, weather, files."""
