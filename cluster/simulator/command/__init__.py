"""Command line options of forecasts."""
