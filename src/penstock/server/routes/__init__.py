"""The endpoints of the API, a module for each noun."""
