"""The services behind `up`: Prefect, MLflow, their databases and their guard."""
