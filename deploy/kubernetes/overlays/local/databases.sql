-- Run once by the postgres image on an empty data directory: a database for each server.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
